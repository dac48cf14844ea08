"""How products and rows are shared out among the threads of a GPU."""
