"""What runs on the device: standard library only, Python 3.10, copied flat into the bundle.

On the device these files lie side by side and import each other by bare name. They are run with
`python3 -S -E -B`: no site-packages, no PYTHONPATH, and no bytecode written beside signed files.
"""
