"""CUDA as an offload worker sees it: one protocol, a simulation of its ordering rules, its adversaries."""
