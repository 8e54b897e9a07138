"""x"""
def looks_like(d, n): return False
def convert(t, f): raise NotImplementedError
