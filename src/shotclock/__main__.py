from .main import run_program

run_program()
