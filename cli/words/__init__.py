"""What stands on command lines: places of devices, options as IREE spells them."""
