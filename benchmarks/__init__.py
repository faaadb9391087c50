"""Benchmarks of fa_inductor: coverage over real models, whole-model time and memory, compile time."""
