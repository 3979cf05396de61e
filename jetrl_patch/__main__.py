"""Run the ``jetrl`` command as ``python -m jetrl_patch``."""

from jetrl_patch.cli.main import main

if __name__ == "__main__":
    main()
