"""Uploads an exported folder to the Hugging Face hub; without --yes it only shows the upload.

de-jax push_to_hub exported --repo=my-org/my-retriever
de-jax push_to_hub exported --repo=my-org/my-retriever --private --yes

Prints one JSON object: the files with their sizes, the card, and with --yes the address. The token comes from `hf auth login` or
HF_TOKEN.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from de_jax import command
from de_jax.interop import hub
from de_jax.reports import tables


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    hub.check_repo(args.repo)
    files = {str(name): (args.folder / name).stat().st_size for name in hub.exported_files(args.folder)}
    card = hub.card_of(args.folder)
    print(tables.text_table(["file", "bytes"], [[name, f"{size:,}"] for name, size in files.items()]), file=sys.stderr)
    print(f"\n{card}" if card else f"\n{args.folder} has no README.md, so its page will be empty.", file=sys.stderr)
    url = hub.push(args.folder, args.repo, private=args.private) if args.yes else None
    if url is None:
        print(f"Nothing was sent; with --yes this goes to {args.repo}.", file=sys.stderr)
    report = {"repo": args.repo, "private": args.private, "pushed": url is not None, "url": url}
    print(json.dumps({**report, "num_bytes": sum(files.values()), "files": files, "card": card}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder written by de-jax export_model")
    parser.add_argument("--repo", required=True, help="organisation/name; an existing repository gets a new commit")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--yes", action="store_true", help="upload; default a dry run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
