"""Importable CuTe DSL library the generated kernels call. Imports cutlass and itself, nothing else of mokgen."""
