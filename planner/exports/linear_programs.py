"""The linear programs that a plan stands on, as files of solvers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions
from planner.problems import ProblemError
from planner.training_plan.model import TrainingPlan

Write = Callable[[TrainingPlan, ExportOptions], str]


def flow_programme(form: str) -> Write:
    """Writer of the linear program of a plan's flow of microbatches."""

    @_refusing
    def write(plan: TrainingPlan, _: ExportOptions) -> str:
        # solvers load when they are asked for
        from planner.lp.flow import flow_linear_program
        from planner.lp.flow_model import ABOUT, flow_model
        from planner.lp.model_file import ModelFormat, model_text
        from planner.planning.linear_programs import flow_of_plan

        flow, microbatches, names = flow_of_plan(plan)
        programme = flow_linear_program(flow, microbatches)
        return model_text(flow_model(flow, programme, names), ModelFormat(form), ABOUT)

    return write


def averaging_programme(form: str) -> Write:
    """Writer of LP (5) of DeDLOC for the devices of a stage."""

    @_refusing
    def write(plan: TrainingPlan, options: ExportOptions) -> str:
        from planner.lp.model_file import ModelFormat
        from planner.lp.paper_model import build_paper_model
        from planner.planning.linear_programs import averaging_of_stage

        problem, names = averaging_of_stage(plan, options.stage)
        return build_paper_model(problem, names=names).text(ModelFormat(form))

    return write


def _refusing(write: Write) -> Write:
    """What cannot be posed cannot be written."""

    @wraps(write)
    def told(plan: TrainingPlan, options: ExportOptions) -> str:
        try:
            return write(plan, options)
        except ProblemError as error:
            raise ExportError(str(error)) from None

    return told
