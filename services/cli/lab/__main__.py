"""``python -m services.cli.lab``: the lab's command alone."""

from services.cli.lab.app import lab

if __name__ == "__main__":
    lab()
