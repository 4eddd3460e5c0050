"""Trees to rows to loss to optimizer to published weights."""
