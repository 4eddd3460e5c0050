"""`python …/guest SOCKET KIND`: a folder that runs, so that this folder alone is on the path."""

import sys

from miles_worker.protocol import run

if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
