"""Templates of matmuls and convolutions on tensor cores: mma (from Ampere on), wgmma (Hopper), and their epilogues."""
