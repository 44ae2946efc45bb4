"""Code that runs on a device for the length of one call: standard library only, Python 3.10.

Nothing of it is installed: each call sends the modules it needs ahead of its request, so that the
device always runs the code of the machine that asks. Only the supervisor of service scope `process`
is left there as a file.
"""
