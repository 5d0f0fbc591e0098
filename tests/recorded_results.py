"""A recorded result of three seeds, whose command prints what the test says."""

TOY = """
title: Toys
papers:
  - name: Toy paper
    picture: {file: toys.png, alt: Toys, drawing: {rows: [a, b], panels: [{title: Left, entry: toy, column: nDCG@10}]}}
    claims:
      - {says: It plays, published: ".9", here: "yes", found: It does., entries: [toy]}
      - {says: It flies, published: figure 1, here: not tested, found: No design has it.}
    untested: [Outdoors.]
entries:
  base:
    title: A model
    question: Is there one?
    verdict: There is.
    date: 2026-11-23
    commits: [abcdef0]
    machine: a toy
    versions: any
    seeds: []
    commands:
      - |
        echo '{"method": "a", "scores": {"ndcg@10": 0.9}}' && touch model
  toy:
    title: A toy
    question: Does it roll?
    verdict: It rolls.
    date: 2026-11-23
    commits: [abcdef0]
    machine: a toy
    versions: any
    seeds: [0, 1, 2]
    needs: [data]
    after: [base]
    commands:
      - |
        test -e model
        cat data
    tables:
      - rows: |
          | method | nDCG@10 | p |
          | a | .500 ± .010 | |
          | b | **.400** ± .010 | .02 |
        scores:
          - columns: {nDCG@10: [scores, ndcg@10]}
            lines: {a: {method: a}, b: {method: b}}
"""

CHANGED = (
    (
        TOY.replace("| method | nDCG@10 | p |", "| method | nDCG@10 | change | p | MRR |")
        .replace("| a | .500 ± .010 | |", "| a | .500 ± .010 | | | -.02 (p .3) |")
        .replace("| b | **.400** ± .010 | .02 |", "| b | **.400** ± .010 | **-.100** | .02 | +.03 (p .001) |")
    )
    + """\
          - changes: {nDCG@10: [compared, 0, systems, b]}
            lines: {b: {design: toy.yaml}}
          - changes: {MRR: [compared, 1, systems, b]}
            lines: {a: {design: toy.yaml}, b: {design: toy.yaml}}
"""
)
"""The same with changes: of nDCG@10 in cells of their own, of MRR in one; that of a's MRR has a large p."""


def write_results(root, text=TOY, theme="toys"):
    """Writes a theme below `root`/results."""
    folder = root / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{theme}.yaml").write_text(text, encoding="utf-8")
    return folder
