"""`python -m de_jax <verb>`: the same as `de-jax <verb>`, where the script is not on the path."""

from de_jax.cli import main

if __name__ == "__main__":
    main()
