"""Federated learning in the shuffle model of differential privacy.

The names of `__init__.pyi` are imported when they are first used. Each room of the repository is a
package in here: `shufl.accounting`, `shufl.shuffler`, `shufl.clients`, `shufl.server`,
`shufl.simulator`, `shufl.deploy`, `shufl.configs`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
