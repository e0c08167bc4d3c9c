"""Federated learning in the shuffle model of differential privacy.

Each room of the repository is a package in here: `shufl.accounting`, `shufl.shuffler`,
`shufl.clients`, `shufl.server`, `shufl.simulator`, `shufl.configs`.
"""
