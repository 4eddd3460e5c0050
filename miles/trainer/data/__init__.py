"""What trees become before any tensor exists: rows, batches, micro-batches."""
