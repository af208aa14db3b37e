"""Explanations of the figures and sections of a report, as HTML."""

INTRODUCTION = (
    "All measurements use the sparse kernels of <code>msattn.attach</code> (on a CPU their references, which read only the "
    "selected keys), not masked dense attention. "
    "<i>Sparsity</i> is the share of the causally visible blocks that is not read. <i>Keys read</i> is the "
    "share of the visible keys that is read. <i>Recall</i> is the share of the attention mass in the keys that are read. "
    "<i>Latency</i> is the time of a prefill, of a decoded token (for routing), or of a whole answer (for "
    "your own prompts)."
)
EXAMPLES = (
    "All methods answer the same prompts, each in the setting that reads the fewest keys. Long prompts show only their end."
)
NEEDLE_EXAMPLES = (
    " Needle prompts are shortened to the hidden statement and their end. The prompts shown are those on which the methods "
    "differ most. Each token of an answer is the model's most likely token after the correct tokens before it."
)
CAPTIONS = {
    "tradeoff": (
        "Quality against the share of the keys that is read and, next to it (on a phone below it), against the measured time "
        "relative to dense attention on the same prompts. This is the time of a prefill for block selections, and of a decoded "
        "token for routing (if the task <code>decoding</code> ran). The best corner is the upper left one for needles and the "
        "lower left one for perplexity. The dotted line is dense attention."
    ),
    "speed": (
        "First the time to the first token of one prompt, then tokens per second of <code>model.generate</code> for one "
        "sequence with a cache of random keys. <i>Dense, transformers</i> is the model without msattn. <i>Dense, same "
        "cache and graphs</i> reads every key with the cache and CUDA graphs of <code>msattn.attach</code>, so its distance "
        "to the sparse lines comes only from the keys that these do not read. The fastest kernel is the fastest of PyTorch's "
        "SDPA backends at each length; in decoding it runs without <code>generate</code>, on a GPU as a CUDA graph of one "
        "token. With many methods, each is shown in the setting that reads the fewest keys."
    ),
    "perplexity": (
        "Increase of perplexity over dense attention, against sparsity. Lower is better. <i>Oracle</i> selects blocks by the "
        "true attention map (gate.target=mass). It saves no time, because the map needs dense attention. "
        "Bars are 95 % intervals of the difference from dense attention on the same chunks. The scale is linear within 1 % and "
        "logarithmic above; methods far above are only counted."
    ),
    "recall": (
        "Left: the share of the dense model's attention mass in the keys that are read, averaged over layers, heads and "
        "queries. Right: the relative squared error of the attention output. Block selections are measured on every query of "
        "a prefill, and routing on decoding queries with its dense window. So compare block selections only with each other, "
        "and routers only with each other. Every method gets the dense model's queries, keys and values."
    ),
    "recall_heads": (
        "Attention mass read by each head, in the setting of each method that reads the fewest keys. A dark cell is a head "
        "that loses most of its attention mass. Retrieval may depend on a single head."
    ),
    "recall_maps": (
        "Prefill of one held-out chunk, for the first head of three layers. A row is a block of queries and a column a block "
        "of keys. The true map is the largest attention probability in each block, and the scores should resemble it. Yellow "
        "blocks on the right are read."
    ),
    "recall_decoded": (
        "Decoding of the last token of the chunk, in the layer and head with the most attention mass outside the window of "
        "first and last keys. Top: where the attention mass is. Below: the share of the keys that each method reads at each "
        "position; dark green is all of them. A good router reads where the mass is."
    ),
    "needle": (
        "Share of the hidden numbers that are found, against the share of keys read. The upper left corner is best. Bars are "
        "95 % Wilson intervals; every method runs the same prompts. A number counts as found if each of its tokens is the "
        "model's most likely token."
    ),
    "needle_grid": (
        "Share of the hidden numbers that are found, by depth of the needle (0 %: start of the context) and length of the "
        "context. A low value at one depth means that the method does not read that region."
    ),
    "documents": (
        "Increase of perplexity over dense attention on the first tokens of held-out documents, against their number. Lower is "
        "better. With many methods, each is shown in the setting that reads the fewest keys."
    ),
    "ruler": (
        "Mean score over RULER's tasks, against the share of keys read. The score of an answer is the share of the expected "
        "texts in it. The upper left corner is best. Bars are 95 % intervals; every method runs the same prompts."
    ),
    "ruler_grid": (
        "Score of each RULER task by prompt length. <i>vt</i> asks for variables that take each other's values; <i>cwe</i> and "
        "<i>fwe</i> for the most frequent words of a list and of a coded text. The other tasks hide needles with one or "
        "several keys, values and questions."
    ),
    "analysis_planes": (
        "Keys and queries of one key/value head in the plane of their first two principal components (SAAP, figure 1). If the "
        "two clouds lie apart, the bucket nearest to a query says little about the keys that the query attends to. Large dots "
        "are the first position, the attention sink."
    ),
    "analysis_buckets": (
        "Bucket sizes of k-means partitions before and after RoPE (SAAP, figure 2). Left: deviation from the sizes in the "
        "training text, for samples with the same number of keys; 1 is the mean size of a bucket. The samples of the training "
        "text show the deviation that occurs by chance. Middle: the deviation by position of the keys. It is large everywhere "
        "if buckets follow the position instead of the content. Right: the sizes in order; the level line shows equal buckets."
    ),
    "analysis_mass": (
        "Share of the attention mass in the top keys of each decoding query (SAAP, figure 3). Heads near the line of equal "
        "weights attend everywhere and lose most with sparse attention. The lines of layers and the map count only keys "
        "outside the window of first and last keys, and the mass of these keys."
    ),
    "analysis_error": (
        "Relative squared error of the attention output, and the attention mass that is not read, against the share of keys "
        "read (SAAP, figures 5 and 10). The points of a router are 1, 2, 4, ... probes. Every method also reads the window of "
        "first and last keys. <i>Exact top keys</i> are chosen for each query head, so no router can do better; routers "
        "choose for a query group, as in serving. All measured layers count, including those that serving keeps dense. "
        "Attention is computed in fp32, without the sparse kernels."
    ),
    "latency": (
        "Left: speed-up of the time to the first token over the fastest dense attention, by length. Below 1 dense attention "
        "is faster; <code>msattn.attach</code> uses it for prompts shorter than <code>dense_below</code>. Right: how the "
        "time of the longest prompt is spent. With many methods, each is shown in the setting that reads the fewest keys."
    ),
}
