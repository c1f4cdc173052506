"""The commands of `hf-linattn`, one file each: `add_arguments` to a parser, and `run` what was given."""
