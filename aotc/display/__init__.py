"""Results as documents: values for tables and lines, rendered as text of any width and as HTML."""
