"""Register tiles: a function of vector code for each shape of product."""
