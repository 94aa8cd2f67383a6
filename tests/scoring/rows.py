"""A row of a file of measured steps, as small as a row can be."""

ROW = {
    "name": "small",
    "family": "llama",
    "layers": "4",
    "hidden": "512",
    "heads": "8",
    "seq": "512",
    "global_batch": "32",
    "gpu": "a100-80gb",
    "gpus_per_node": "4",
    "nodes": "1",
    "measured_step_s": "0.1",
}
