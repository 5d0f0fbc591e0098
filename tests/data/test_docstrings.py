import os
import textwrap

import pytest

from de_jax.data.text import docstrings

REST = "The values are taken in the order of the axes, and a copy is made where it is needed."

SOURCE = f'''
"""A module about arrays and what can be done with them.

{REST}
"""
raise RuntimeError("a source that is read must never run")

class Box(Base, metaclass=Meta):
    """Holds a few arrays under their names.

    {REST}
    """

    async def open(self, path: "Path", *names: str, mode: int = 3, **rest: int) -> None:
        """Opens the box that lies at a path.

        {REST}
        """

    if True:
        def hidden(self):
            """Returns what no one has seen so far.

            {REST}
            """
            def inner():
                """Does the real work of the outer one.

                {REST}
                """

    def undocumented(self): ...
'''


def read(tmp_path, source, module="pkg.boxes"):
    (tmp_path / "boxes.py").write_text(source)
    return docstrings.read_file(tmp_path / "boxes.py", module)


def test_functions_classes_and_modules_are_found_without_running_anything(tmp_path):
    found = read(tmp_path, SOURCE)
    assert [(doc.doc_id, doc.signature) for doc in found] == [
        ("pkg.boxes", "module pkg.boxes"),
        ("pkg.boxes:Box", "class pkg.boxes.Box(Base)"),
        ("pkg.boxes:Box.open", "pkg.boxes.Box.open(self, path, *names, mode=3, **rest)"),
        ("pkg.boxes:Box.hidden", "pkg.boxes.Box.hidden(self)"),
        ("pkg.boxes:Box.hidden.inner", "pkg.boxes.Box.hidden.inner()"),
    ]
    assert found[1].summary == "Holds a few arrays under their names."
    assert {doc.rest for doc in found} == {REST}


@pytest.mark.parametrize("source", ["def f(:\n", "x = '\0'\n", "'" * 3, "(" * 5000])
def test_files_that_do_not_parse_are_passed_over(tmp_path, source):
    assert read(tmp_path, source) == []


def test_missing_and_undecodable_files_are_passed_over(tmp_path):
    assert docstrings.read_file(tmp_path / "absent.py", "absent") == []
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""')
    assert docstrings.read_file(tmp_path / "latin.py", "latin") == []
    os.mkfifo(tmp_path / "pipe.py")
    assert docstrings.read_file(tmp_path / "pipe.py", "pipe") == []


def test_a_default_too_deep_to_be_written_down_is_passed_over(tmp_path):
    deep = "+".join("1" * 4000)
    assert read(tmp_path, f'def f(a={deep}):\n    """Adds a few numbers to others.\n\n    {REST}\n    """\n') == []


def test_of_two_definitions_of_one_name_the_first_counts(tmp_path):
    one = f'def f():\n    """Gives the first of two things.\n\n    {REST}\n    """\n'
    found = read(tmp_path, one + one.replace("first", "second"))
    assert [doc.summary for doc in found] == ["Gives the first of two things."]


def test_long_signatures_are_cut(tmp_path):
    parameters = ", ".join(f"parameter_{number}=None" for number in range(50))
    found = read(tmp_path, f'def f({parameters}):\n    """Takes very many parameters at once.\n\n    {REST}\n    """\n')
    assert len(found[0].signature) <= 300
    assert found[0].signature.endswith(", ...")


@pytest.mark.parametrize(
    ("docstring", "summary", "rest"),
    [
        (f"Return the first sentence only.  {REST}", "Return the first sentence only.", REST),
        (f"Return a sum, e.g. Kahan's, of numbers. {REST}", "Return a sum, e.g. Kahan's, of numbers.", REST),
        (f"Wraps a summary over\ntwo lines of text.\n\n{REST}", "Wraps a summary over two lines of text.", REST),
        (f"Has no full stop at the end\n\n{REST}", "Has no full stop at the end", REST),
        (f"A heading over its line\n=======================\n{REST}", "A heading over its line", REST),
        (f"See :func:`~np.foo <x>` and ``bar`` and baz.\n\n{REST}", "See np.foo and bar and baz.", REST),
    ],
)
def test_the_first_sentence_is_the_summary(docstring, summary, rest):
    assert docstrings.split_docstring(docstring) == (summary, rest)


def test_examples_references_and_underlines_are_left_out():
    docstring = textwrap.dedent(
        f"""
        Computes the norm of a vector.

        {REST}

        Parameters
        ----------
        x : array
            What is measured.

        See Also
        --------
        dot : Computes the inner product of vectors.

        Returns
        -------
        float
            Its length.

            >>> norm([3, 4])
            5.0

        .. versionadded:: 1.2

        Examples
        --------
        Say something:

        >>> norm([0, 0])
        0.0
        """
    )
    expected = f"{REST} Parameters x : array What is measured. Returns float Its length."
    assert docstrings.split_docstring(docstring) == ("Computes the norm of a vector.", expected)


def test_indented_example_sections_end_with_their_indentation():
    docstring = f"Computes the norm of a vector.\n\n{REST}\n\nExample:\n  norm(x)\n\n  more\n\nArgs:\n  x: What is measured."
    assert docstrings.split_docstring(docstring)[1] == f"{REST} Args: x: What is measured."


@pytest.mark.parametrize(
    "docstring",
    [
        "Computes the norm of a vector.",
        "Computes the norm of a vector.\n\nToo short a rest.",
        f"Two words.\n\n{REST}",
        f"{'many ' * 41}words.\n\n{REST}",
        f"Computes the norm of a vector.\n\n{REST} computes the norm of a vector, that is.",
        "   ",
    ],
)
def test_docstrings_that_make_no_fair_pair_are_refused(docstring):
    assert docstrings.split_docstring(docstring) is None


def test_long_descriptions_are_cut_between_words():
    rest = docstrings.split_docstring("Computes the norm of a vector.\n\n" + "description " * 1000)[1]
    assert len(rest) <= 2000
    assert rest.endswith("description ...")
