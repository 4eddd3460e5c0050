"""What computes: the sharded model, its attention over trees, its head, its optimizer."""
