"""What is known of reductions along rows that need each other: softmax, variance."""
