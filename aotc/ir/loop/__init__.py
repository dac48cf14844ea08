"""Loop IR: one kernel as typed loops, with its printer, parser, verifier and interpreter."""
