"""Random programs at the sizes of real models: one op with what usually surrounds it, compared with float64 or XLA."""
