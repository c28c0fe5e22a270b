"""Words and protocols: the named, frozen types on each arrow of the data flow.

This room imports only the standard library, so that every other room can speak it.
"""
