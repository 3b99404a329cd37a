"""The parts of `deploy/check`."""

import pathlib

DEPLOY = pathlib.Path(__file__).resolve().parent.parent
