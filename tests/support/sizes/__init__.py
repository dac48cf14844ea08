"""Random programs at the sizes of real models: one op with its usual context, compared with float64 or XLA."""
