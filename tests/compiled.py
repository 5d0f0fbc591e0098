"""A function as one program; called op by op, each of its operations is compiled alone."""

import inspect

import jax


def compiled(function):
    """The function, compiled anew for other shapes and other keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    options = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return jax.jit(function, static_argnames=options)
