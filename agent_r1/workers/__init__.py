"""Environment workers: processes, often on other machines, in which environments and their tools run.

:class:`EnvironmentWorker` serves environments over HTTP. The episodes of a :class:`RemoteEnv` run on workers.
"""
