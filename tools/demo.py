"""Opens a page to try a model: results of BM25, dense retrieval, their fusion and a second model side by side.

de-jax demo --run_dir=runs/sde --dataset_dir=data/beir/scifact
de-jax demo --run_dir=runs/sde --dataset_dir=data/beir/scifact --compare=all-MiniLM-L6-v2 --port=8080

Needs Gradio: pip install 'de_jax[demo]'. Prints the address of the page, which only this machine can open unless --host or --share
is given. The first start encodes the corpus and keeps it. Ctrl-C ends the page.
"""

from __future__ import annotations

import argparse
import errno
import json
import socket
import sys
from typing import Annotated

from de_jax import arguments, command
from de_jax.data.text import beir, input_policy
from de_jax.demo import gradio_page
from de_jax.settings import Range, numeric
from de_jax.types import InputError

LOOPBACK = "127.0.0.1"
PORT = 7860
Port = Annotated[int, Range(1, 65535)]


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    gradio_page.import_gradio()
    beir.find_file(args.dataset_dir, "corpus")
    check_port(args.host, args.port)  # all of these before a model loads
    if args.compare_step and not args.compare:
        raise InputError("--compare_step is for --compare; give --compare too.")
    blocks = gradio_page.page(
        args.run_dir,
        args.dataset_dir,
        compare=args.compare,
        step=args.step,
        compare_step=args.compare_step,
        skip_empty=args.skip_empty,
    )
    if args.host != LOOPBACK or args.share:
        print("Everyone who can reach the address can search this corpus.", file=sys.stderr)
    print(json.dumps({"url": gradio_page.serve(blocks, host=args.host, port=args.port, share=args.share)}), flush=True)
    print("Open the address in a browser. Ctrl-C ends the page.", file=sys.stderr)
    blocks.block_thread()


def check_port(host: str, port: int) -> None:
    """Refuses a port that another program listens on.

    Raises:
        InputError: the port is taken or needs rights, or the host is no address of this machine.
    """
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is taken; end the program that uses it, or give another --port.") from None
        if error.errno == errno.EACCES:
            raise InputError(f"port {port} needs rights that you do not have; give a --port from 1024 on.") from None
        raise InputError(
            f"--host is {host}, which is not an address of this machine; give {LOOPBACK}, or 0.0.0.0 for all of its addresses."
        ) from None


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "to try", dtype=False)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table with the corpus")
    parser.add_argument("--compare", help="a second run, folder or hub name, in a column of its own")
    parser.add_argument("--compare_step", help="checkpoint of --compare")
    input_policy.add_flags(parser)
    parser.add_argument("--host", type=str, default=LOOPBACK, help=f"address to listen on (default {LOOPBACK}, this machine only)")
    parser.add_argument("--port", type=numeric(Port), default=PORT, help=f"port to listen on (default {PORT})")
    parser.add_argument("--share", action="store_true", help="also ask Gradio's servers for a public address")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
