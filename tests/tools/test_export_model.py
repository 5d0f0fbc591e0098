import shutil

import numpy as np
import pytest

from de_jax.interop import any_model
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError


def test_the_chosen_step_is_exported_once(trained, tmp_path, printed):
    out_dir = tmp_path / "exported"
    flags = {"run_dir": trained, "step": 3, "format": "sentence_transformers", "out_dir": out_dir}
    report = printed("export model", **flags)
    files = [file for file in out_dir.rglob("*") if file.is_file()]
    assert report == {
        "out_dir": str(out_dir),
        "format": "sentence_transformers",
        "step": 3,
        "notes": [],
        "num_bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
    }
    expected = load_run(trained, 3).params["shared"]["projection"]["kernel"]
    np.testing.assert_array_equal(any_model.read(out_dir).params["shared"]["projection"]["kernel"], expected)
    with pytest.raises(InputError, match="exists already"):
        printed("export model", **flags)


def test_the_length_of_training_is_said_and_changed_by_a_flag(trained, tmp_path, printed):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "recipe.json").write_text("{}")
    flags = {"run_dir": run, "format": "sentence_transformers"}
    length = load_run(run).doc.max_length
    (note,) = printed("export model", **flags, out_dir=tmp_path / "as_trained")["notes"]
    assert note.startswith(f"documents are cut at {length} tokens, as in training, and the encoder takes 512; --max_doc_length of")
    assert printed("export model", **flags, max_doc_length=200, max_query_length=9, out_dir=tmp_path / "longer")["notes"] == []
    found = any_model.read(tmp_path / "longer")
    assert (found.query.max_length, found.doc.max_length) == (9, 200)
