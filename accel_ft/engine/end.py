"""The end of a run: evaluate and export the final model, and write its predictions."""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accel_ft.checkpoint import convert, state, transaction
from accel_ft.engine.evaluation import predict_split, write_mistakes, write_predictions
from accel_ft.engine.run import Run
from accel_ft.errors import UserError
from accel_ft.model import adapters, load
from accel_ft.runtime.memory import peak_memory

logger = logging.getLogger(__name__)


def finish(run: Run) -> None:
    """Export the final (or best) model; evaluate it on validation and test rows. Collective."""
    run.wait_for_publication()
    if run.accelerator.is_main_process and run.num_nonfinite == 0:
        run.prune(run.config.save_total_limit, run.protected_step)  # a kill may have prevented it
    run.close()
    if run.step < run.num_steps:
        best = f"{run.best['metric']} {run.best['value']:.4f}" if run.best else "none"
        logger.info(
            "stopped early, as no evaluation of the last %d was better by more than %g; the best "
            "is %s", run.num_worse, run.config.early_stopping_threshold, best,
        )  # fmt: skip
    model_step, best_step = run.step, run.protected_step
    if best_step is not None:
        if best_step != run.step:
            if not state.is_sound(run.watch, run.best_folder()):
                raise run.best_is_lost()
            convert.load_any(run.accelerator, run.best_folder())
        model_step = best_step
        logger.info("the model is that of update %d", model_step)
    from accel_ft.metrics import best_thresholds, score

    logits, names = run.logits, run.splits.label_names
    if logits is None or run.evaluated_step != model_step:
        run.watch.stage("eval", can_save=True)
        logits = predict_split(run.accelerator, run.model, run.validation_loader, run.check_stop)
    labels = run.splits.validation.labels(np.arange(len(logits), dtype=np.int64))
    lost = len(logits) - int(np.isfinite(logits).all(axis=1).sum())
    if lost:
        keeps = run.config.load_best_model_at_end
        raise UserError(
            f"the model of update {model_step} returns NaN or infinite logits for {lost} of "
            f"{len(logits)} validation rows; no model/ is written. Fix: start a new run with "
            "a lower learning_rate, more warmup_steps, or "
            + ("a smaller eval_steps" if keeps else "load_best_model_at_end")
        )
    if run.config.problem_type == "multi_label_classification":
        run.thresholds = best_thresholds(logits, labels)
        run.unwrapped_model().config.thresholds = run.thresholds.tolist()
    scores = score(logits, labels, names, run.thresholds)
    run.watch.stage("save", can_save=True)
    _export(run, run.output_dir / "model")
    _leave_predictions(run, logits, model_step)
    run.events.write(
        "end",
        step=run.step,
        model_step=model_step,
        num_worse=run.num_worse,
        **{f"eval_{key}": value for key, value in scores.items()},
        peak_memory=max(run.watch.all_gather(peak_memory(run.accelerator.device))),
    )


def _leave_predictions(run: Run, logits: NDArray[np.float32], model_step: int) -> None:
    """Evaluate the final model on the test rows, if any, and write its predictions for these and
    for the validation rows. Collective.
    """
    found = {"validation": logits}
    if run.test_loader is not None:
        run.watch.stage("eval", can_save=True)
        _, found["test"] = run.measure("test", run.test_loader, model_step)
    with state.all_or_none(run.watch, run.output_dir / "predictions"):
        if run.accelerator.is_main_process:
            write_predictions(run.output_dir, run.splits, found, run.thresholds)
            name, logits = found.popitem()  # the last
            write_mistakes(run.output_dir, run.config, run.splits, name, logits, run.thresholds)


def _export(run: Run, final: Path) -> None:
    """Write the model as a Hugging Face folder, atomically. Collective."""
    weights = run.accelerator.get_state_dict(run.model)
    weights = {load.plain_name(name): value for name, value in weights.items()}
    with state.all_or_none(run.watch, final):
        if run.accelerator.is_main_process:
            run.watch.check_folder()
            model, lora = run.unwrapped_model(), adapters.peft_config(run.unwrapped_model())
            if lora is not None:
                base = run.identity["pretrained"]
                model = adapters.merged(model.config, lora.to_dict(), weights, base)
                weights = model.state_dict()
            with transaction.writing(final) as staging:
                model.save_pretrained(staging, state_dict=weights)
                run.tokenizer.save_pretrained(staging)
