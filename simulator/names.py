"""The names that a configuration may use, and where to find what they mean.

A mistake in a configuration is said before torch, Flower or Ray are imported: nothing here, nor in
`simulator.config`, needs them. What a name stands for is imported by `simulator.section.find`.
"""

DATASETS = {
    "digits": "simulator.data.datasets:digits",
    "mnist": "simulator.data.datasets:mnist",
    "fashion-mnist": "simulator.data.datasets:fashion_mnist",
    "cifar10": "simulator.data.datasets:cifar10",
}
FEATURES = {"scattering": "simulator.data.features:whitened_scattering"}
PARTITIONS = ("iid", "by-label", "dirichlet", "repeated")
ACCOUNTANTS = ("theorem3", "rdp", "pld", "blanket", "crowd", "local")
