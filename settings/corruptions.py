"""The names of ImageNet-C's corruptions, which ``loading.transforms.corruption`` applies."""

# ImageNet-C's (arXiv:1903.12261): the benchmark's, then those that the paper keeps for validation.
BENCHMARK: tuple[str, ...] = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
CORRUPTIONS: tuple[str, ...] = (*BENCHMARK, "speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = (1, 2, 3, 4, 5)
