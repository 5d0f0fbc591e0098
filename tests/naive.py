"""Reference implementations to test against: loops over Python floats in float64, one candidate at a time, written from the papers.

They share no code with the library, and are slow and plain on purpose. Embeddings come as a record of numpy arrays.
"""

import math

PADDING = -1


def score(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def negative_log_likelihood(positive, negatives, label_smoothing=0.0):
    """Cross-entropy in nats of the softmax over [positive, *negatives] with the smoothed target."""
    logits = [positive, *negatives]
    highest = max(logits)
    log_total = highest + math.log(sum(math.exp(x - highest) for x in logits))
    loss = 0.0
    for position, logit in enumerate(logits):
        target = label_smoothing / len(logits) + (1.0 - label_smoothing if position == 0 else 0.0)
        loss -= target * (logit - log_total)
    return loss


def log_sum_exp(logits):
    highest = max(logits)
    return highest + math.log(sum(math.exp(x - highest) for x in logits))


def mean(values):
    return sum(values) / len(values) if values else 0.0


def real_rows(e):
    return [i for i in range(len(e.query_id)) if e.query_id[i] != PADDING]


def other_rows(e, i, mask_duplicates):
    """The rows whose query and document may be negatives of row i's."""
    rows = []
    for j in real_rows(e):
        shares_an_id = e.query_id[i] == e.query_id[j] or e.doc_id[i] == e.doc_id[j]
        shares_an_id = shares_an_id or is_relevant(e, i, e.doc_id[j]) or is_relevant(e, j, e.doc_id[i])
        if j != i and not (mask_duplicates and shares_an_id):
            rows.append(j)
    return rows


def is_relevant(e, i, doc_id):
    return e.positive_ids is not None and doc_id != PADDING and doc_id in e.positive_ids[i]


def is_too_close(e, i, anchor, candidate, *place):
    """Whether a guide finds a candidate as close to row i's `anchor`, "query" or "doc", as the limit says."""
    if e.guide is None or e.guide.limit is None:
        return False
    vector = getattr(e.guide, candidate)
    for number in place:
        vector = vector[number]
    return score(getattr(e.guide, anchor)[i], vector) >= e.guide.limit[i]


def others(e, i, anchor, candidate, mask_duplicates):
    """The other rows' queries or documents that may be negatives of row i's query or document."""
    rows = [j for j in other_rows(e, i, mask_duplicates) if not is_too_close(e, i, anchor, candidate, j)]
    return [getattr(e, candidate)[j] for j in rows]


def mined(e, rows, i, anchor, candidate, mask_duplicates):
    """The negatives mined for some rows that may be negatives of row i's query or document."""
    vectors = getattr(e, candidate)
    ids, own_ids = (e.neg_doc_ids, own_docs(e, i)) if candidate == "neg_docs" else (e.neg_query_ids, [e.query_id[i]])
    found = []
    for row in rows if vectors is not None else []:
        for n in range(len(vectors[row])):
            if ids is not None and ids[row][n] == PADDING:
                continue
            if ids is not None and mask_duplicates and ids[row][n] in own_ids:
                continue
            if not is_too_close(e, i, anchor, candidate, row, n):
                found.append(vectors[row][n])
    return found


def mined_docs(e, i, anchor, mask_duplicates):
    return mined(e, real_rows(e), i, anchor, "neg_docs", mask_duplicates)


def own_docs(e, i):
    return [e.doc_id[i], *(e.positive_ids[i] if e.positive_ids is not None else [])]


def mined_queries(e, i, anchor, mask_duplicates):
    return mined(e, real_rows(e), i, anchor, "neg_queries", mask_duplicates)


def query_to_doc(e, i, temperature, mask_duplicates, same_tower=False, margin=0.0, label_smoothing=0.0, margin_on="score"):
    """Row i's loss of finding its document by its query."""
    negatives = others(e, i, "query", "doc", mask_duplicates) + mined_docs(e, i, "query", mask_duplicates)
    if same_tower:
        negatives += others(e, i, "query", "query", mask_duplicates)
    scores = [score(e.query[i], negative) for negative in negatives]
    positive = score(e.query[i], e.doc[i]) / temperature - margin / (temperature if margin_on == "score" else 1.0)
    return negative_log_likelihood(positive, [s / temperature for s in scores], label_smoothing)


def doc_to_query(e, i, temperature, mask_duplicates, same_tower=False, margin=0.0, label_smoothing=0.0, margin_on="score"):
    """Row i's loss of finding its query by its document."""
    negatives = others(e, i, "doc", "query", mask_duplicates) + mined_queries(e, i, "doc", mask_duplicates)
    if same_tower:
        negatives += others(e, i, "doc", "doc", mask_duplicates)
    scores = [score(e.doc[i], negative) for negative in negatives]
    positive = score(e.doc[i], e.query[i]) / temperature - margin / (temperature if margin_on == "score" else 1.0)
    return negative_log_likelihood(positive, [s / temperature for s in scores], label_smoothing)


def hardness_weighted(e, *, hardness, of, temperature=0.01, directions="both", mask_duplicates=True):
    """`in_batch_softmax` whose negatives weigh exp(hardness * score), where they are of that kind."""
    total = 0.0
    sides = {"query_to_doc": ("query", "doc", "neg_docs"), "doc_to_query": ("doc", "query", "neg_queries")}
    for anchor, candidate, mined_name in sides.values() if directions == "both" else [sides[directions]]:
        losses = []
        for i in real_rows(e):
            own = mined(e, [i], i, anchor, mined_name, mask_duplicates)
            in_batch = others(e, i, anchor, candidate, mask_duplicates)
            in_batch += mined(e, [row for row in real_rows(e) if row != i], i, anchor, mined_name, mask_duplicates)
            logits = []
            for kind, vectors in (("mined", own), ("in_batch", in_batch)):
                found = [score(getattr(e, anchor)[i], vector) for vector in vectors]
                logits += [s / temperature + (hardness * s if of in ("all", kind) else 0.0) for s in found]
            losses.append(negative_log_likelihood(score(e.query[i], e.doc[i]) / temperature, logits))
        total += mean(losses)
    return total


def global_orthogonal(e, *, mean_weight=1.0, second_moment_weight=1.0, reduce_sides="mean"):
    total = 0.0
    for vectors, ids in ((e.query, e.query_id), (e.doc, e.doc_id)):
        rows = [i for i in real_rows(e) if ids[i] not in ids[:i]]
        scores = [score(vectors[i], vectors[j]) for i in rows for j in rows if i != j]
        second_moment = mean([s * s for s in scores])
        total += mean_weight * mean(scores) ** 2 + second_moment_weight * max(0.0, second_moment - 1 / len(vectors[0]))
    return total if reduce_sides == "sum" else total / 2


def graded(e, similarity):
    """(similarity, grade) of every graded pair of the batch."""
    found = []
    for i in real_rows(e):
        docs = [(e.doc[i], e.scores[i][0])]
        for n in range(len(e.neg_docs[i]) if e.neg_docs is not None else 0):
            if e.neg_doc_ids is None or e.neg_doc_ids[i][n] != PADDING:
                docs.append((e.neg_docs[i][n], e.scores[i][1 + n]))
        found += [(similarity(e.query[i], doc), grade) for doc, grade in docs if grade == grade]
    return found


def cosent(e, *, temperature=0.05, similarity=score):
    pairs = graded(e, similarity)
    wrong = [(low - high) / temperature for high, grade in pairs for low, other in pairs if grade > other]
    return log_sum_exp([0.0, *wrong])


def angle(e, *, temperature=0.05):
    def complex_score(a, b):
        half = (len(a) + 1) // 2
        a, b = ([*map(float, vector), 0.0][: 2 * half] for vector in (a, b))
        pairs = zip(a[:half], a[half:], b[:half], b[half:], strict=True)
        product = sum(complex(q, r).conjugate() * complex(d, s) for q, r, d, s in pairs)
        return abs(product.real - product.imag)

    return cosent(e, temperature=temperature, similarity=complex_score)


def in_batch_softmax(
    e,
    *,
    temperature=0.01,
    directions="both",
    reduce_directions="sum",
    label_smoothing=0.0,
    margin=0.0,
    margin_on="score",
    mask_duplicates=True,
    same_tower="",
):
    losses = []
    if directions in ("both", "query_to_doc"):
        with_queries = same_tower in ("query", "both")
        rows = [
            query_to_doc(e, i, temperature, mask_duplicates, with_queries, margin, label_smoothing, margin_on) for i in real_rows(e)
        ]
        losses.append(mean(rows))
    if directions in ("both", "doc_to_query"):
        with_docs = same_tower in ("doc", "both")
        rows = [
            doc_to_query(e, i, temperature, mask_duplicates, with_docs, margin, label_smoothing, margin_on) for i in real_rows(e)
        ]
        losses.append(mean(rows))
    return mean(losses) if reduce_directions == "mean" else sum(losses)


def samtone(e, *, same_tower="query", **hyper_parameters):
    return in_batch_softmax(e, same_tower=same_tower, **hyper_parameters)


def nce(e, *, temperature=0.01, mask_duplicates=True):
    losses = []
    for i in real_rows(e):
        scores = [score(e.query[i], doc) / temperature for doc in others(e, i, "query", "doc", mask_duplicates)]
        hardest = [max(scores)] if scores else []
        losses.append(negative_log_likelihood(score(e.query[i], e.doc[i]) / temperature, hardest))
    return mean(losses)


def pair(e, *, form="samtone_eq3", alpha=0.1, temperature=0.01, reduce_directions="sum", mask_duplicates=True):
    """Mixes the query-centric loss with the document-centric one of that form."""
    doc_centric = {"samtone_eq3": pair_eq3_row, "pair_paper": pair_paper_row, "pair_code": pair_code_row}[form]
    query_centric = in_batch_softmax(
        e,
        temperature=temperature,
        directions="both" if form == "samtone_eq3" else "query_to_doc",
        reduce_directions=reduce_directions,
        mask_duplicates=mask_duplicates,
    )
    doc_losses = mean([doc_centric(e, i, temperature, mask_duplicates) for i in real_rows(e)])
    return (1 - alpha) * query_centric + alpha * doc_losses


def pair_eq3_row(e, i, temperature, mask_duplicates):
    negatives = [score(e.doc[i], doc) / temperature for doc in others(e, i, "doc", "doc", mask_duplicates)]
    return log_sum_exp(negatives) - score(e.query[i], e.doc[i]) / temperature if negatives else 0.0


def pair_paper_row(e, i, temperature, mask_duplicates):
    found = others(e, i, "doc", "doc", mask_duplicates) + mined_docs(e, i, "doc", mask_duplicates)
    negatives = [score(e.doc[i], negative) / temperature for negative in found]
    return negative_log_likelihood(score(e.query[i], e.doc[i]) / temperature, negatives)


def pair_code_row(e, i, temperature, mask_duplicates):
    found = others(e, i, "doc", "query", mask_duplicates) + mined_docs(e, i, "doc", mask_duplicates)
    negatives = [score(e.doc[i], negative) / temperature for negative in found]
    return negative_log_likelihood(score(e.query[i], e.doc[i]) / temperature, negatives)


def ance(e, *, temperature=1.0, in_batch=False, mask_duplicates=True):
    losses = []
    for i in real_rows(e):
        negatives = mined(e, [i], i, "query", "neg_docs", mask_duplicates)
        if in_batch:
            negatives += others(e, i, "query", "doc", mask_duplicates)
        logits = [score(e.query[i], negative) / temperature for negative in negatives]
        losses.append(negative_log_likelihood(score(e.query[i], e.doc[i]) / temperature, logits))
    return mean(losses)


def dance(e, *, dual_weight=0.1, temperature=0.01, mask_duplicates=True):
    losses = []
    for i in real_rows(e):
        negatives = mined(e, [i], i, "doc", "neg_queries", mask_duplicates)
        logits = [score(e.doc[i], negative) / temperature for negative in negatives]
        losses.append(negative_log_likelihood(score(e.query[i], e.doc[i]) / temperature, logits))
    return ance(e, temperature=temperature, mask_duplicates=mask_duplicates) + dual_weight * mean(losses)


def candidates(e, i, temperature, teacher="scores"):
    """(student's scaled score, teacher's score) of row i's document and of its negatives; None where the teacher says nothing."""
    if teacher == "guide":
        docs = [(e.doc[j], e.guide.doc[j]) for j in [i, *(j for j in real_rows(e) if j != i)]]
        docs += [
            (doc, e.guide.neg_docs[j][n])
            for j in real_rows(e)
            for n, doc in enumerate(e.neg_docs[j] if e.neg_docs else ())
            if e.neg_doc_ids is None or e.neg_doc_ids[j][n] != PADDING
        ]
        return [(score(e.query[i], own) / temperature, score(e.guide.query[i], of_guide)) for own, of_guide in docs]
    vectors, there = [e.doc[i], *e.neg_docs[i]], [True, *(n != PADDING for n in e.neg_doc_ids[i])]
    scored = zip(vectors, there, e.scores[i], strict=True)
    return [(score(e.query[i], v) / temperature, t) if is_there and t == t else None for v, is_there, t in scored]


def margin_mse(e, *, temperature=1.0, teacher="scores"):
    errors = []
    for i in real_rows(e):
        positive, *negatives = candidates(e, i, temperature, teacher)
        for negative in negatives:
            if positive and negative:
                errors.append(((positive[0] - negative[0]) - (positive[1] - negative[1])) ** 2)
    return mean(errors)


def kl_distillation(e, *, temperature=1.0, teacher_temperature=1.0, teacher="scores"):
    losses = []
    for i in real_rows(e):
        known = [one for one in candidates(e, i, temperature, teacher) if one]
        if len(known) < 2:
            continue
        scaled = [s for s, _ in known], [t / teacher_temperature for _, t in known]
        log_s, log_t = ([x - log_sum_exp(logits) for x in logits] for logits in scaled)
        losses.append(sum(math.exp(t) * (t - s) for s, t in zip(log_s, log_t, strict=True)))
    return mean(losses)


def relevance_weighted(e, *, weight="score", temperature=0.01, directions="both", mask_duplicates=True):
    rows = [i for i in real_rows(e) if e.scores[i][0] == e.scores[i][0]]
    weights = [max(e.scores[i][0], 0.0) if weight == "score" else 1 / (1 + math.exp(-e.scores[i][0])) for i in rows]
    losses = {"query_to_doc": query_to_doc, "doc_to_query": doc_to_query}
    total = 0.0
    for name in losses if directions == "both" else [directions]:
        of_rows = [losses[name](e, i, temperature, mask_duplicates) for i in rows]
        total += sum(w * loss for w, loss in zip(weights, of_rows, strict=True)) / (sum(weights) or 1.0)
    return total


def matryoshka(e, *, loss, dims, weights, normalize=True, **options):
    total = 0.0
    for dim, weight in zip(dims, weights, strict=True):
        cut = {name: first(getattr(e, name), dim, normalize) for name in ("query", "doc", "neg_docs", "neg_queries")}
        total += weight * loss(e._replace(**cut), **options)
    return total


def guided(e, *, loss, margin=0.0, relative=False, **options):
    limits = []
    for query, doc in zip(e.guide.query, e.guide.doc, strict=True):
        own = score(query, doc)
        limits.append(own - 1e-6 - (margin * abs(own) if relative else margin))
    return loss(e._replace(guide=e.guide._replace(limit=limits)), **options)


def first(vectors, dim, normalize):
    """The first dimensions of vectors in lists of any depth, scaled to length 1 again where any were cut off."""
    if vectors is None:
        return None
    if isinstance(vectors[0], list):
        return [first(inner, dim, normalize) for inner in vectors]
    length = math.sqrt(sum(x * x for x in vectors[:dim])) if normalize and dim < len(vectors) else 1.0
    return [x / length for x in vectors[:dim]]


def span_corrupted(tokens, mask, first_sentinel):
    """Raffel et al. 2020, section 3.1.4 and figure 2: (inputs, targets), token by token."""
    sides = []
    for hidden in (True, False):
        side, number = [], 0
        for place, token in enumerate(tokens):
            if mask[place] != hidden:
                side.append(token)
            elif place == 0 or mask[place - 1] != hidden:
                side.append(first_sentinel - number)
                number += 1
        sides.append(side)
    return tuple(sides)
