"""Providers: the code that carries out steps, one file per step type; none knows another."""
