"""``attnmon paper``: the paper's five experiments on any causal model, each claim with its verdict.

Source: "Limitations of Normalization in Attention Mechanism" (arXiv 2508.17821), *the paper*. One subject a file:

    options     what can be chosen, and what is refused before anything is computed
    model, small_model, text    the model, its tokens
    capture     one forward -> the rows of each head, through attnmon's own capture
    measure     the rows of one head -> numbers, for each experiment
    runner      which units (experiment, length, chunk) are missing, and their computation
    store       finished units and tables on disk
    summary, claims    tables -> what is drawn and what is set beside the paper's figures
    figures, page      what a person looks at
    from_run    the same two pictures over the training steps of a monitored run
    command     all of it in order
"""
