"""Rows by split."""

from env import add, broken

train = [add(one=n, two=n + 1) for n in range(6)]
test = [add(one=n, two=10) for n in range(3)]
faulty = [broken(one=1)]
for split, rows in (("train", train), ("test", test), ("faulty", faulty)):
    for number, row in enumerate(rows):
        row.slug, row.columns = f"{split}-{number}", {"split": split}
