"""Parse an exported command line with Megatron and print the result as JSON."""

from __future__ import annotations

import json

from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args


def main() -> None:
    """Parse, validate, build the configuration, and lay out layers and ranks."""
    args = parse_args()
    validate_args(args, {})
    pipelines, replicas = args.pipeline_model_parallel_size, args.data_parallel_size
    config = core_transformer_config_from_args(args)
    layers = None
    if pipelines > 1:
        layout = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, pipelines)
        layout.validate_layer_layout(args.num_layers, 0)
        layers = [[kind.name for kind in layout.layout[stage][0]] for stage in range(pipelines)]
    ranks = RankGenerator(
        tp=1, ep=1, dp=replicas, pp=pipelines, cp=1, order="tp-cp-ep-dp-pp"
    ).get_ranks("pp")
    found = {
        "layers": layers,
        "pipelines": ranks,
        "hidden": config.hidden_size,
        "bf16": args.bf16,
        "recompute": [args.recompute_granularity, args.recompute_num_layers],
        "tied": not args.untie_embeddings_and_output_weights,
        "rank": args.rank,
    }
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
