"""`python -m hf_linattn`: the commands."""

import sys

from .cli.main import main

sys.exit(main())
