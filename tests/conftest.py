from hypothesis import settings

# Machines that run tests are noisy: a time limit would say more of them than of the code.
settings.register_profile("dragoman", deadline=None)
settings.load_profile("dragoman")
