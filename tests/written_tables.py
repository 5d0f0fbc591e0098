"""Tables as others write them: by csv, json, gzip and pyarrow, never by de_jax."""

import csv
import gzip
import json

import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet


def _csv(path, rows, encoding="utf-8", **dialect):
    with open(path, "w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), **dialect)
        writer.writeheader()
        writer.writerows(rows)
    return path


def _compressed(path):
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


def _of_arrow(path, rows):
    """The format by the name."""
    table = pyarrow.Table.from_pylist(rows)
    write = {
        ".csv": lambda: pyarrow.csv.write_csv(table, path),  # quotes every text
        ".parquet": lambda: pyarrow.parquet.write_table(table, path, row_group_size=7),
        ".feather": lambda: pyarrow.feather.write_feather(table, path, chunksize=7),
        ".arrow": lambda: _stream(path, table),
    }
    write[path.suffix]()
    return path


def _stream(path, table):
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def dataset(folder, splits):
    """A folder as `datasets.DatasetDict.save_to_disk` makes it, rows by split."""
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, rows in splits.items():
        names = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
        (folder / split).mkdir()
        for name, some in zip(names, (rows[: len(rows) // 2], rows[len(rows) // 2 :]), strict=True):
            _stream(folder / split / name, pyarrow.Table.from_pylist(some))
        state = {"_data_files": [{"filename": name} for name in names], "_split": split, "_format_type": None}
        (folder / split / "state.json").write_text(json.dumps(state))
    return folder


WRITERS = {
    "csv": lambda folder, rows: _csv(folder / "a.csv", rows),
    "csv with LF": lambda folder, rows: _csv(folder / "a.csv", rows, lineterminator="\n", quoting=csv.QUOTE_ALL),
    "csv of Excel": lambda folder, rows: _csv(folder / "a.csv", rows, encoding="utf-8-sig", delimiter=";"),
    "csv.gz": lambda folder, rows: _compressed(_csv(folder / "a.csv", rows)),
    "csv of arrow": lambda folder, rows: _of_arrow(folder / "a.csv", rows),
    "tsv": lambda folder, rows: _csv(folder / "a.tsv", rows, delimiter="\t"),
    "jsonl": lambda folder, rows: write_lines(folder / "a.jsonl", rows),
    "jsonl.gz": lambda folder, rows: _compressed(write_lines(folder / "a.jsonl", rows)),
    "json": lambda folder, rows: write(folder / "a.json", json.dumps(rows, indent=1, ensure_ascii=False)),
    "json lines": lambda folder, rows: write_lines(folder / "a.json", rows),
    "parquet": lambda folder, rows: _of_arrow(folder / "a.parquet", rows),
    "feather": lambda folder, rows: _of_arrow(folder / "a.feather", rows),
    "arrow": lambda folder, rows: _of_arrow(folder / "a.arrow", rows),
    "datasets": lambda folder, rows: dataset(folder / "a", {"train": rows}),
}
"""Each writes rows of texts, all with the same columns, into a folder, and gives the path."""


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def write_lines(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))
