"""Registrations of seqio tasks: each module has `register(name, ...)`, which names the files, the splits and the vocabulary.

    beir         any folder in the BEIR layout
    msmarco      MS MARCO's passages and documents, as they are distributed
    multireqa    sentence-level answers: MRQA's questions with MultiReQA's sentence boundaries
    openqa       DPR's json: questions with positive and hard negative passages
    local        a jsonl or tsv file of pairs for each split
    tfds         a TensorFlow dataset and which of its features are the query and the document
    mined        a folder of mined negatives over the texts of another task

`name` is the task's. `tokenizer` and `doc_tokenizer` are sentencepiece models, the second for documents where it differs.
`skip_empty` yields empty texts instead of refusing them, for `seqio_pairs` or `import task` to leave out.

`seqio_pairs.module = "de_jax.tasks.beir"` and `seqio_pairs.module_args = {...}` use one of them; a mixture, or mined negatives,
take a module of your own that calls several. These modules import seqio, so they are imported by what uses them alone.
"""
