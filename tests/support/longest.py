"""The test files that take longest. pytest runs them first, and ``make check`` last."""

# They take ten seconds of a core and more, the longest first. ``make test`` begins with them, so
# that its workers end at about the same time.
LONGEST = [
    "test_documents.py", "test_main.py", "test_one_port.py", "test_fuzz_data.py", "test_fuzz_configuration.py",
    "test_engine.py", "test_zoo.py", "test_fuzz_weights.py", "test_weight_bombs.py", "test_fuzz_values.py",
    "test_exported_formats.py", "test_failed_starts.py", "test_resume.py", "test_fuzz_images.py", "test_damage.py",
    "test_stand_in.py", "test_kills.py", "test_recipes.py", "test_fuzz_runs.py", "test_launched.py",
    "test_inference.py", "test_gpus.py", "test_workers.py", "test_scales.py", "test_launched_runs.py",
    "test_disk.py", "test_serve_life.py", "test_graphs.py", "test_benchmark_serve.py", "test_attacked.py",
    "test_benchmark_rates.py", "test_predict.py", "test_tutorial.py", "test_streams.py", "test_interruptions.py",
    "test_start.py", "test_stall.py",
]  # fmt: skip
