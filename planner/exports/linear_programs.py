"""Export of the linear programs behind a plan, as solver files."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions
from planner.problems import ProblemError
from planner.training_plan.model import TrainingPlan

Write = Callable[[TrainingPlan, ExportOptions], str]

FLOW_HEADER = (
    "Microbatches as a flow through the stages. through_N, over_N_M: fraction of all microbatches",
    "on device N and from N to M. period: seconds per microbatch. lack: largest violation of "
    "spare.",
    "Objective: period x microbatches + mean round trip, in seconds, + penalty x lack.",
    "Rows: busy_N, pair_N_M, line_K: busy time of a device, pair or shared link is at most the",
    "period; spare_N_M: the same with a reserve; memory_N: microbatches in flight (Little's law, "
    "with",
    "the delays of the previous flow); out_N, in_N: flow conservation.",
)
"""Comment at the top of a flow program's file."""
AVERAGING_HEADER = (
    "DeDLOC's averaging (Diskin et al. 2021, eq. 5). a_I_J: rate at which peer I sends gradients "
    "to",
    "reducer J. g_I_J: rate at which reducer I returns the average to peer J. c_I: whether peer I",
    "contributes gradients. xi: steps per second, maximised. Rows: compute: samples of a step;",
    "average_I: peer I receives a whole average per step; sender_I_J_K: reducer I returns to J at",
    "most what it receives from K; upload_I, download_I, link_I_J: bandwidth limits.",
)
"""Comment at the top of an averaging program's file."""


def flow_exporter(form: str) -> Write:
    """Return an exporter of the linear program of a plan's microbatch flow."""

    @_as_export_error
    def write(plan: TrainingPlan, _: ExportOptions) -> str:
        # imported here: other formats do not need the solvers
        from planner.lp.flow import flow_linear_program
        from planner.lp.flow_model import flow_model
        from planner.lp.model_file import ModelFormat, model_text
        from planner.planning.linear_programs import flow_of_plan

        flow, microbatches, names = flow_of_plan(plan)
        program = flow_linear_program(flow, microbatches)
        return model_text(flow_model(flow, program, names), ModelFormat(form), FLOW_HEADER)

    return write


def averaging_exporter(form: str) -> Write:
    """Return an exporter of DeDLOC's linear program (5) for the devices of a stage."""

    @_as_export_error
    def write(plan: TrainingPlan, options: ExportOptions) -> str:
        from planner.lp.model_file import ModelFormat, model_text
        from planner.lp.paper_model import build_paper_model
        from planner.planning.linear_programs import averaging_of_stage

        problem, names = averaging_of_stage(plan, options.stage)
        built = build_paper_model(problem, names=names)
        units = (
            f"Unit of xi: {built.xi_unit:.12g} steps/s. Unit of a and g: {built.unit:.12g} bytes/s."
        )
        return model_text(built.model, ModelFormat(form), (*AVERAGING_HEADER, units))

    return write


def _as_export_error(write: Write) -> Write:
    """Turn `ProblemError` into `ExportError`."""

    @wraps(write)
    def wrapper(plan: TrainingPlan, options: ExportOptions) -> str:
        try:
            return write(plan, options)
        except ProblemError as error:
            raise ExportError(str(error)) from None

    return wrapper
