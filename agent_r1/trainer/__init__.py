"""The policy update: the protocol of trainers, two trainers, and the updater that calls one."""
