"""Custom calls by name: what each of them means in ops."""
