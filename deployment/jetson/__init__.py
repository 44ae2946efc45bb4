"""Templates and on-device code of the Jetson bundle, and the stage that fills them."""
