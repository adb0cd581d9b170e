"""What holds for the groups of a model's layers, by which rates and freezing go."""


def assert_one_group_each(model, groups):
    """Asserts that each parameter belongs to exactly one of the groups of prefixes."""
    for name, _ in model.named_parameters():
        owners = [
            prefix
            for group in groups
            for prefix in group
            if name == prefix or name.startswith(f"{prefix}.")
        ]
        assert len(owners) == 1, name
