"""`python -m zerolab`."""

from zerolab.cli import app

if __name__ == "__main__":
    app(prog_name="python -m zerolab")
